"""The layer and the kind of attention of a module, by its name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mhacli.record.record import NonAttentionLayer
from mhacli.text.tokens import AttentionKind

LayerKey = tuple[AttentionKind, int]
"""The kind of an attention and the number of its layer."""
_CROSS = re.compile(r"encdec|encoder_attn|cross|multihead_attn", re.IGNORECASE)


def kind_of(name: str, *, is_pair: bool) -> AttentionKind:
    """The kind of an attention, by the name of its module.

    >>> kind_of("decoder.block.2.layer.1.EncDecAttention", is_pair=True)
    'cross'
    """
    if not is_pair:
        return "self"
    parts = name.split(".")
    half = next((part for part in parts if part in ("encoder", "decoder")), "decoder")
    if half == "encoder":
        return "encoder"
    return "cross" if _CROSS.search(parts[-1]) else "decoder"


def is_numbered(name: str) -> bool:
    """Whether a module is one of a list, as layers are."""
    return name.rpartition(".")[2].isdigit()


class LayerNumbers:
    """Numbers the attentions of one pass, in the order in which they run.

    A layer is one run of a module of the list of layers. It has the number of this module; if that is taken, because layers share
    a module or one list follows another, it gets the next number.
    """

    def __init__(self, *, is_pair: bool) -> None:
        self._is_pair = is_pair
        self._last: dict[bool, tuple[int, int]] = {}
        self._parts = Counter[tuple[str, int]]()

    def next(self, name: str, block: str, run: int) -> tuple[int, AttentionKind, int]:
        """The layer, the kind and the part of an attention that module `name` computes, in a `run` of its `block`.

        >>> places = LayerNumbers(is_pair=False)
        >>> [places.next("layers.0.attn", "layers.0", run)[0] for run in (1, 1, 2)]
        [0, 0, 1]
        """
        kind = kind_of(name, is_pair=self._is_pair)
        last, last_run = self._last.get(kind == "encoder", (-1, None))
        if run != last_run:
            own = next((int(part) for part in block.split(".") if part.isdigit()), 0)
            last = max(own, last + 1)
            self._last[kind == "encoder"] = last, run
        part = self._parts[name, run]
        self._parts[name, run] += 1
        return last, kind, part


def n_attentions_of(config: Any) -> int:
    """The number of attentions in a pass by the config; a decoder that reads an encoder has two in each layer."""
    return sum(n for _, n in _stacks(config))


def _stacks(config: Any) -> list[LayerKey]:
    """The kinds of attention in a pass, with the number of layers of each."""
    n = n_layers_of(config)
    if not config.is_encoder_decoder:
        return [("self", n)]
    halves = [getattr(config, name, None) for name in ("encoder_layers", "num_encoder_layers", "num_layers")]
    return [("encoder", next((count for count in halves if isinstance(count, int)), n)), ("decoder", n), ("cross", n)]


def n_layers_of(config: Any) -> int:
    """The number of layers in a config, in an encoder-decoder that of the decoder; 0 if there is no single number."""
    found = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
    return found if isinstance(found, int) else 0


def size_of(config: Any, name: str) -> int:
    """A size in a config, the largest if it has one per layer; 0 if it is missing."""
    value = getattr(config, name, None) or 0
    return max((int(one) for one in value if one), default=0) if isinstance(value, (list, tuple)) else int(value)


def without_attention(
    config: Any, found: Sequence[LayerKey], unfit: Mapping[LayerKey, str]
) -> tuple[NonAttentionLayer, ...]:
    """The layers without a captured attention, with the reason if it is `unfit`, otherwise with their type in the config. In an
    encoder-decoder, each kind of attention is listed separately."""
    types = dict(enumerate(getattr(config.get_text_config(decoder=True), "layer_types", None) or ()))

    def instead(kind: AttentionKind, number: int) -> str:
        if kind == "self":
            return unfit.get((kind, number)) or str(types.get(number, "no attention matrix"))
        return f"{kind} {unfit.get((kind, number), 'attention, which was not seen')}"

    missing = [(kind, n) for kind, n_all in _stacks(config) for n in range(n_all) if (kind, n) not in found]
    missing += [place for place in unfit if place not in missing]
    return tuple(NonAttentionLayer(n, instead(kind, n)) for kind, n in missing)


def positions_of(model: Any) -> str:
    """The position encoding of a model, by its parts."""
    config = model.config.get_text_config(decoder=True)
    kinds = {type(module).__name__ for module in model.modules()}
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "alibi"  # Falcon has a rotation too, but does not use it
    if any("Rotary" in kind for kind in kinds) or getattr(config, "rotary_dim", None):
        return "rope-interleaved" if config.model_type in ("gptj", "codegen", "cohere") else "rope"
    if "relative_attention_bias" in names or getattr(config, "relative_attention", False):
        return "relative"
    is_learned = names & {"wpe", "position_embeddings", "embed_positions", "position_embedding"}
    return "learned" if is_learned else "none"


def most_positions(config: Any) -> int | None:
    """The largest number of positions of a model; None if it has no such limit, as with ALiBi or binned distances."""
    text = config.get_text_config(decoder=True)
    is_binned = getattr(text, "relative_attention_num_buckets", None) or getattr(text, "relative_attention", False)
    if is_binned or getattr(text, "alibi", False) or text.model_type in ("bloom", "mpt"):
        return None
    for name in ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            pad = (
                getattr(text, "pad_token_id", None)
                if text.model_type in ("roberta", "xlm-roberta", "camembert")
                else None
            )
            return value - (pad + 1 if isinstance(pad, int) else 0)  # these count from after the row for padding
    return None


def rope_theta_of(config: Any, layer: int) -> float:
    """The base of the rotary angles of a layer, by its type if types differ; 10000 if the config has none."""
    text = config.get_text_config(decoder=True)
    types = list(getattr(text, "layer_types", None) or ())
    named = getattr(text, "rope_parameters", None) or {}
    found = named.get("rope_theta", getattr(text, "rope_theta", None)) if isinstance(named, dict) else None
    own = named.get(types[layer]) if isinstance(named, dict) and layer < len(types) else None
    if found is None and isinstance(own, dict):
        found = own.get("rope_theta")
    return float(found) if isinstance(found, (int, float)) and found > 0 else 10_000.0
