"""What a checkpoint under examination reads, and whether it is meant to hide later tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mhacli.adapters.hf.capture import is_attention
from mhacli.adapters.hf.load import Loaded
from mhacli.adapters.hf.tokenizer import first_tokens
from mhacli.compute.doctor.passes import Row
from mhacli.spec.tokens import TokenSequence

TEXTS = (
    "The bell rang twice before anyone in the old house woke up, and by then the snow had covered the road, the garden and "
    "the gate.",
    "In 1969 they carried 21 kilograms of stones home, didn't they?",
    "Read it again.",
)
"""What is read where nobody gives a text: sentences of several lengths, with a number and marks."""
MOST_TOKENS, MOST_OF_OURS = 512, 48
"""Tokens of a text that are read, of the user's and of our own."""
RANDOM_LENGTHS = (29, 13, 6)
"""Of ids drawn at random, where there is no tokenizer."""
_GENERATING = re.compile(r"(ForCausalLM|LMHeadModel|DoubleHeadsModel|ForConditionalGeneration)$")
_CAUSAL_HEAD = re.compile(r"(ForCausalLM|[a-z0-9]LMHeadModel|DoubleHeadsModel)$")


def architectures_of(config: Any) -> tuple[str, ...]:
    """The classes that a config names, of whatever it holds there."""
    named = getattr(config, "architectures", None)
    return tuple(name for name in named if isinstance(name, str)) if isinstance(named, (list, tuple)) else ()


def wants_head(config: Any) -> bool:
    """Whether the checkpoint is said to hold a language head, so that its logits can be looked at."""
    return any(_GENERATING.search(name) for name in architectures_of(config))


def rows_of(sequences: Sequence[TokenSequence], context: Sequence[TokenSequence] = ()) -> tuple[Row, ...]:
    """Rows of at least two lengths where that can be, the longest first: the texts, and beginnings of the longest one where they
    are too few. With a `context`, its texts are what the encoder reads."""
    texts, read = _of_lengths(sequences), _of_lengths(context) if context else ()
    return tuple(Row(text, read[(place + 1) % len(read)] if read else None) for place, text in enumerate(texts))


def _of_lengths(sequences: Sequence[TokenSequence]) -> tuple[TokenSequence, ...]:
    ordered = sorted(sequences, key=lambda text: -len(text.ids))
    n, lengths = len(ordered[0].ids), {len(text.ids) for text in ordered}
    if len(ordered) < 3 or len(lengths) < 2:
        cuts = [cut for cut in (2 * n // 3, n // 3) if cut and cut not in lengths]
        ordered += [first_tokens(ordered[0], cut) for cut in cuts]
    return tuple(sorted(ordered, key=lambda text: -len(text.ids)))


def numbered(ids: Sequence[int]) -> TokenSequence:
    """Tokens that are the names of their ids."""
    tokens = tuple(f"<{i}>" for i in ids)
    return TokenSequence("", tokens, tuple(ids), tuple((0, 0) for _ in tokens))


def random_sequences(n_vocabulary: int, most: int | None, avoid: set[int], seed: int) -> tuple[TokenSequence, ...]:
    """Ids drawn at random, for a checkpoint without a tokenizer."""
    generator = torch.Generator().manual_seed(seed)
    known = [i for i in range(min(n_vocabulary, 4096)) if i not in avoid] or [0]
    lengths = [min(n, most or n) for n in RANDOM_LENGTHS]
    drawn = [torch.randint(len(known), (n,), generator=generator).tolist() for n in lengths]
    return tuple(numbered([known[i] for i in places]) for places in drawn)


def why_not_causal(loaded: Loaded) -> str | None:
    """Why tokens of this model may see later ones; None where it is meant to hide them from each token.

    A config's `is_decoder` says nothing of it in most families. What does is the language head that a checkpoint names, and the
    family: one that transformers knows for generation alone.
    """
    from transformers.models.auto import modeling_auto

    config, text = loaded.config, loaded.text_config
    if config.is_encoder_decoder:
        return None
    family = text.model_type
    if getattr(text, "is_causal", True) is False or getattr(text, "use_bidirectional_attention", None):
        return "its config says that tokens see later ones"
    if getattr(text, "attn_type", None) == "bi" or getattr(text, "causal", None) is False:
        return f"{family} sees all tokens"
    if any(_CAUSAL_HEAD.search(name) for name in architectures_of(config)):
        return None
    generates = {config.model_type, family} & set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    fills = {config.model_type, family} & set(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    is_decoder = bool(getattr(text, "is_decoder", False))
    if generates and (is_decoder or not (fills or _says_bidirectional(loaded.model))):
        return None
    return "an encoder, whose tokens see later ones"


def _says_bidirectional(model: nn.Module) -> bool:
    """Whether the attentions of a model say of themselves that they hide nothing."""
    parts = [module for name, module in model.named_modules() if is_attention(name, module)]
    said = [module.is_causal for module in parts if hasattr(module, "is_causal")]
    return bool(said) and not any(said)
