"""A decoder of transformers (is_decoder=True) whose body lost that flag: every token sees all."""

import copy

from transformers import BertGenerationConfig, BertGenerationDecoder


def build():
    sizes = dict(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = BertGenerationDecoder(
        BertGenerationConfig(**sizes, max_position_embeddings=300, is_decoder=True)
    ).eval()
    body = copy.deepcopy(model.config)
    body.is_decoder = False
    for part in model.bert.modules():
        if hasattr(part, "config"):
            part.config = body
        if hasattr(part, "is_causal"):
            part.is_causal = False
    return model
