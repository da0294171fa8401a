"""The sizes of a checkpoint under mha's names, from the names of its family in `config.json`.

Nothing is guessed from shapes: a size that the config lacks is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mhacli.errors import bad_file
from mhacli.settings import MAX_WIDTH

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
_ENCODER: Mapping[str, tuple[str, ...]] = {
    "n_layers": ("encoder_layers",),
    "n_heads": ("encoder_attention_heads",),
    "positions": ("max_source_positions",),
}
_DECODER: Mapping[str, tuple[str, ...]] = {
    "n_layers": ("decoder_layers", "num_decoder_layers"),
    "n_heads": ("decoder_attention_heads",),
    "positions": ("max_target_positions",),
}
_TABLES = {
    "self": (_NAMES, _ENCODER, _DECODER),
    "encoder": (_ENCODER, _NAMES),
    "decoder": (_DECODER, _NAMES),
    "cross": (_DECODER, _NAMES),
}
"""The tables of names by stack, in the order in which they are looked up. Other stacks have the common names only."""
_LARGEST = {"vocabulary": 1 << 31, "positions": 1 << 53}
_NESTED = ("text_config", "vision_config", "audio_config", "attn_config", "encoder", "decoder")


def size_of(config: Mapping[str, Any], name: str, stack: str = "self") -> int | None:
    """A size of one `stack` of a checkpoint (encoder, decoder, cross, text, vision), or in general (self): that of the language
    model, and of an encoder before a decoder. `vocabulary` and `positions` are numbers of rows of tables.

    Defaults: `n_kv_heads` is `n_heads`, `d_head` is `d_model / n_heads`, and `d_v` is `d_head`.
    """
    part, nested = config, config.get("text_config" if stack == "self" else f"{stack}_config")
    if isinstance(nested, Mapping) and (stack != "self" or not any(config.get(each) for each in _NAMES["n_heads"])):
        part = nested
    names = [each for table in _TABLES.get(stack, (_NAMES,)) for each in table.get(name, ())]
    value = next((part[each] for each in names if part.get(each) is not None), None)
    size = value if isinstance(value, int) else None
    if name == "n_kv_heads":
        return _kv_heads(part, size, size_of(config, "n_heads", stack))
    if name == "d_head" and size is None:
        d_model, n_heads = size_of(config, "d_model", stack), size_of(config, "n_heads", stack)
        return d_model // n_heads if d_model and n_heads and d_model % n_heads == 0 else None
    return size_of(config, "d_head", stack) if name == "d_v" and size is None else size


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
    sizes = ((ours, theirs) for table in _TABLES["self"] for ours in table for theirs in table[ours])
    for ours, theirs in sizes:
        for where, part in parts.items():
            value, largest = part.get(theirs), _LARGEST.get(ours, MAX_WIDTH)
            if value is None or isinstance(value, Mapping):
                continue
            for count in value if isinstance(value, list) else [value]:
                if type(count) is not int or not 1 <= count <= largest:
                    both = where + theirs if ours == theirs else f"{ours} ({where}{theirs})"
                    message = f"{path}: {both} {count!r:.80} is not a whole number from 1 to {largest}"
                    raise bad_file(path, message)
