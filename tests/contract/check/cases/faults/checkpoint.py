# expect: right
"""A tiny model of transformers with random weights."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def tiny_gpt2():
    torch.manual_seed(0)
    sizes = GPT2Config(vocab_size=37, n_positions=64, n_embd=24, n_layer=2, n_head=3)
    return GPT2LMHeadModel(sizes)
