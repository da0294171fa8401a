"""Models of two layers and 32 columns with random numbers in every parameter, and tokenizers, for
reported cases.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TEXT = "the fox sleeps"
STORY = ["a small river runs past the old mill and the fox sleeps"] * 3
SIZE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
D_HEAD = 8
IMAGE = {"image_size": 16, "patch_size": 8}


@torch.no_grad()
def filled(model: Any, scale: float = 0.3) -> Any:
    """The model in evaluation mode with the same random numbers in every run; the weights of norms
    are around 1.
    """
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        is_norm = "norm" in name.lower() and name.endswith("weight")
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + float(is_norm))
    return model.eval()


def saved(model: Any, folder: Path) -> Path:
    """The folder with the model."""
    import transformers

    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return folder


def llama(*, attention: str = "sdpa") -> Any:
    """A Llama with two kv heads for four heads."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=320,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        **SIZE,
    )
    return filled(transformers.LlamaForCausalLM._from_config(config, attn_implementation=attention))


def llama_folder(folder: Path) -> Path:
    """A folder with the Llama and a tokenizer of bytes."""
    byte_tokenizer(folder)
    return saved(llama(), folder)


def bert_config(**choices: Any) -> Any:
    import transformers

    return transformers.BertConfig(
        **{"vocab_size": 180, "max_position_embeddings": 64, **SIZE, **choices}
    )


def bert_pair() -> Any:
    """An encoder-decoder made of two BERTs."""
    import transformers

    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        bert_config(), bert_config()
    )
    config.decoder_start_token_id, config.pad_token_id = 2, 0
    return filled(transformers.EncoderDecoderModel(config))


def llava() -> Any:
    """A LLaVA with three layers for images and two for text; token 9 stands for one of four
    patches.
    """
    import transformers

    images = transformers.CLIPVisionConfig(**IMAGE, **{**SIZE, "num_hidden_layers": 3})
    text = transformers.LlamaConfig(vocab_size=320, max_position_embeddings=128, **SIZE)
    config = transformers.LlavaConfig(vision_config=images, text_config=text, image_token_index=9)
    return filled(transformers.LlavaForConditionalGeneration(config))


def eager(model: Any) -> Any:
    """The same weights with the attention that transformers itself writes out, which returns its
    weights.
    """
    twin = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="eager")
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def byte_tokenizer(folder: Path, *, template: str | None = None) -> Any:
    """A tokenizer of bytes and pairs that begins a text with <s>, saved in the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    special = ["<s>", "</s>", "<pad>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, show_progress=False, special_tokens=special, initial_alphabet=alphabet
    )
    library.train_from_iterator(STORY, trainer)
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A </s> $B", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    names = dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), special, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, **names)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def word_tokenizer(folder: Path, *, has_types: bool = True) -> Any:
    """A tokenizer of BERT's kind, saved in the folder; with types it gives the second text of a
    pair type 1.
    """
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    library = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer, library.decoder = (
        normalizers.BertNormalizer(lowercase=True),
        decoders.WordPiece(),
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=180, show_progress=False, special_tokens=special)
    library.train_from_iterator(STORY, trainer)
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = dict(
        zip(
            ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True
        )
    )
    inputs = ["input_ids", *["token_type_ids"] * has_types, "attention_mask"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, model_input_names=inputs, **names)
    tokenizer.save_pretrained(folder)
    return tokenizer


def without_head(projection: Any, head: int) -> Any:
    """A hook on an output projection that sees zeros where the head's output was; `.remove()` ends
    it.
    """

    def zero(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        x = args[0].clone()
        x[..., head * D_HEAD : (head + 1) * D_HEAD] = 0
        return (x,)

    return projection.register_forward_pre_hook(zero)


def record_without(model: Any, ids: torch.Tensor, *, outside: bool, **choice: Any) -> Any:
    """The record of a call without heads or edges, `outside` of the removal or within it."""
    import mhacli

    with ExitStack() as stack:
        for number in range(2):
            if outside == bool(number):
                stack.enter_context(mhacli.removed(model, **choice))
            else:
                seen = stack.enter_context(mhacli.inspecting(model, keep=["pattern", "z"]))
        with torch.no_grad():
            model(ids)
    assert seen.record.self_check.ok
    return seen.record
