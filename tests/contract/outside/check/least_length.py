"""A right model of transformers that needs more than two tokens in a text."""

from transformers import CanineConfig, CanineForTokenClassification


def build():
    sizes = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    return CanineForTokenClassification(CanineConfig(**sizes, local_transformer_stride=16)).eval()
