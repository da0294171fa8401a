"""A model of transformers whose word table is a class of its own, not nn.Embedding."""

from transformers import IBertConfig, IBertForMaskedLM


def build():
    sizes = dict(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return IBertForMaskedLM(
        IBertConfig(**sizes, max_position_embeddings=300, pad_token_id=1, bos_token_id=0)
    ).eval()
