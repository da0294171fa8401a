"""A GPT-2 of two layers and eight heads whose weights are written by hand, so that two of the heads
do everything.

Head 0.0 attends to the previous token and copies it into columns of its own; head 1.1 attends to
the positions behind earlier copies of its token, and copies what stands there to the output. The
other six attend to something and write nothing. The norms have an epsilon so large that they change
nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from support.checkpoints import quiet
from support.oracle import softmax

WORDS = "abcdefgh"
N_LAYERS, N_HEADS, N_POSITIONS, GAIN = 2, 4, 16, 8.0
D_HEAD, HALF = 20, 40
TOKEN, POSITION, PREVIOUS, OUTPUT = 0, 8, 24, 32
"""Where the columns of each kind begin. Each stands a second time with the opposite sign, so that
the mean of a row is 0."""
COPYING, INDUCTION = (0, 0), (1, 1)


def induction_checkpoint(folder: Path, sharpness: float) -> Path:
    """A folder with the circuit. A matching key has a score of `sharpness`, every other 0."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = transformers.GPT2Config(
        vocab_size=len(WORDS),
        n_positions=N_POSITIONS,
        n_embd=2 * HALF,
        n_layer=N_LAYERS,
        n_head=N_HEADS,
        layer_norm_epsilon=1e6,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    library = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    with quiet(), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).eval()
        _write(model, sharpness)
        model.save_pretrained(folder)
        transformers.PreTrainedTokenizerFast(tokenizer_object=library).save_pretrained(folder)
    return folder


def _write(model: Any, sharpness: float) -> None:
    for name, parameter in model.named_parameters():
        if ".ln_" in name or "ln_f" in name:
            parameter.fill_(1e3 if name.endswith("weight") else 0.0)  # x · 10³ / √(10⁶ + a little)
        elif "c_attn.weight" not in name:
            parameter.zero_()
    n = len(WORDS)
    _diagonal(model.transformer.wte.weight, 0, TOKEN, n)
    _diagonal(model.transformer.wpe.weight, 0, POSITION, N_POSITIONS)
    for word in range(n):
        model.lm_head.weight[word, OUTPUT + word] = GAIN
    matching = sharpness * D_HEAD**0.5
    for (layer, head), query, key, writes in (
        (COPYING, POSITION, POSITION, PREVIOUS),
        (INDUCTION, TOKEN, PREVIOUS, OUTPUT),
    ):
        attention, width = model.transformer.h[layer].attn, 2 * HALF
        q, k, v = (
            attention.c_attn.weight[:, part * width + head * D_HEAD :][:, :D_HEAD]
            for part in range(3)
        )
        for part in (q, k, v):
            part.zero_()
        is_previous = query == POSITION
        for i in range(N_POSITIONS if is_previous else n):
            if not is_previous:
                q[query + i, i] = matching
            elif i > 0:
                q[query + i, i - 1] = matching  # what position i asks for is the one before it
            k[key + i, i] = 1.0
        for word in range(n):
            v[TOKEN + word, word] = 1.0
        _diagonal(attention.c_proj.weight, head * D_HEAD, writes, n)


def _diagonal(weight: Any, row: int, column: int, n: int) -> None:
    """Ones from a row and a column on, and their opposites."""
    for i in range(n):
        weight[row + i, column + i] = 1.0
        weight[row + i, HALF + column + i] = -1.0


def logits_by_hand(
    text: str, sharpness: float, *, without: tuple[int, int] | None = None
) -> np.ndarray:
    """The logits at the last token, in a dozen lines of arithmetic."""
    ids = [WORDS.index(word) for word in text.split()]
    token = np.eye(len(WORDS))[ids]
    previous = np.zeros_like(token)
    for i in range(len(ids)):
        scores = np.array([sharpness if j == i - 1 else 0.0 for j in range(i + 1)])
        previous[i] = softmax(scores) @ token[: i + 1]
    if without == COPYING:
        previous[:] = 0
    weights = softmax(sharpness * previous @ token[-1])
    return GAIN * (weights @ token) * (without != INDUCTION)
