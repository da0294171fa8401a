"""Tiny checkpoints as folders: weights with a language head, a config, and a tokenizer with a chat template."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mhacli.checkpoints.folder import read_checkpoint
from mhacli.requests.checkpoint import ModelRequest
from mhacli.results.record.head_statistics import HeadsRequest
from support.model_families import BASE, GPT, GROUPED, PLAIN, WINDOW, made, run_plain

STORY = Path(__file__).parents[2] / "sample_texts" / "story.txt"
TEXT = "the cat sat on the mat and the dog sat too"
ANSWER = "the mat"
N_VOCABULARY, N_POSITIONS = 300, 64
PAD, BEGIN, END = "<pad>", "<s>", "</s>"
SPECIAL = (PAD, BEGIN, END, "<|im_start|>", "<|im_end|>")
PAD_ID, BEGIN_ID, END_ID = 0, 1, 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
T5 = {"d_model": 48, "d_kv": 12, "num_layers": 2, "num_heads": 4, "d_ff": 64, "decoder_start_token_id": PAD_ID}
KINDS: dict[str, Mapping[str, Any]] = {
    "gpt2": GPT,
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": WINDOW, "head_dim": 12},
    "gpt_oss": {**GROUPED, "num_local_experts": 4, "head_dim": 16, "sliding_window": WINDOW},
    "bert": {**BASE, **PLAIN, "max_position_embeddings": N_POSITIONS},
    "t5": {**BASE, **T5},
}
FRAMES = {"llama": f"{BEGIN} $A", "t5": f"$A {END}"}
"""What the tokenizer of a family puts around a text."""


@functools.cache
def _trained() -> str:
    """A tokenizer of bytes and their most frequent pairs in the story, as JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N_VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train([str(STORY)], trainer)
    return str(library.to_str())


def tokenizer_of(name: str, **choices: Any) -> Any:
    """The tokenizer of a family, as transformers holds it."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    library = Tokenizer.from_str(_trained())
    if name in FRAMES:
        frame = processors.TemplateProcessing(single=FRAMES[name], special_tokens=[(BEGIN, BEGIN_ID), (END, END_ID)])
        library.post_processor = frame
    told = {"pad_token": PAD, "eos_token": END} | ({"bos_token": BEGIN} if name == "llama" else {}) | choices
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=library, **told)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class Checkpoints:
    """Folders below one, each made when it is first asked for, and never changed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: dict[str, str] = {}

    def of(
        self,
        name: str,
        *,
        generation: Mapping[str, Any] | None = None,
        tokenizer: Mapping[str, Any] | None = None,
        **choices: Any,
    ) -> str:
        """The folder of a family, with other choices in its config, of generation, and for its tokenizer."""
        key = json.dumps([name, generation, tokenizer, choices], sort_keys=True)
        if key not in self._made:
            folder = self.root / f"{name}-{len(self._made)}"
            automatic = {"t5": "AutoModelForSeq2SeqLM", "bert": "AutoModel"}.get(name, "AutoModelForCausalLM")
            own = {**KINDS[name], "vocab_size": N_VOCABULARY, **choices}
            made(name, own, automatic=automatic).save_pretrained(folder)
            tokenizer_of(name, **(tokenizer or {})).save_pretrained(folder)
            if generation is not None:
                path = folder / "generation_config.json"
                path.write_text(json.dumps(json.loads(path.read_text()) | generation))
            self._made[key] = str(folder)
        return self._made[key]


@functools.cache
def reference(folder: str, automatic: str = "AutoModelForCausalLM", **choices: Any) -> Any:
    """The model of a folder as transformers itself loads it."""
    import transformers

    return getattr(transformers, automatic).from_pretrained(folder, **choices).eval()


@torch.no_grad()
def likeliest(folder: str, ids: Sequence[int], n: int, *, encoder: Sequence[int] = (), end: int = END_ID) -> list[int]:
    """`n` tokens more, each the largest of the logits of a pass over all before it; the one that ends is the last."""
    model = reference(folder, "AutoModelForSeq2SeqLM" if encoder else "AutoModelForCausalLM")
    known = list(ids)
    while len(known) < len(ids) + n and known[len(ids) :][-1:] != [end]:
        given = torch.tensor([known])
        keywords = (
            {"input_ids": torch.tensor([encoder]), "decoder_input_ids": given} if encoder else {"input_ids": given}
        )
        known.append(int(run_plain(model, keywords).logits[0, -1].argmax()))
    return known[len(ids) :]


@torch.no_grad()
def attentions(folder: str, automatic: str = "AutoModel", **keywords: Tensor) -> Any:
    """What transformers returns with `eager` and `output_attentions`."""
    return run_plain(reference(folder, automatic, attn_implementation="eager"), keywords, output_attentions=True)


def request_of(folder: str, *texts: str, **choices: Any) -> ModelRequest:
    """What a command asks of a checkpoint."""
    checkpoint = read_checkpoint(folder)
    wanted = choices.pop("wanted", HeadsRequest(command=("mha", "run")))
    return ModelRequest(source=folder, checkpoint=checkpoint, texts=texts, wanted=wanted, device="cpu", **choices)
