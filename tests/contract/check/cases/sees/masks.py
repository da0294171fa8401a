"""Masks themselves, as people write them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

DOCUMENTS = torch.arange(64) // 10


def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 8)


def every_other_head(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & ((h % 2 == 0) | (q - kv < 4))


def of_documents(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]


def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


def sliding(window: int) -> object:
    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (q - kv < window)

    return mod


def blocks() -> BlockMask:
    return create_block_mask(mask_mod, None, None, 300, 300, device="cpu", BLOCK_SIZE=64)


BLOCKS = blocks()


def blocks_of_another() -> BlockMask:
    """The blocks of a window, with the function of a triangle."""
    made = blocks()
    return BlockMask.from_kv_blocks(
        made.kv_num_blocks,
        made.kv_indices,
        made.full_kv_num_blocks,
        made.full_kv_indices,
        BLOCK_SIZE=64,
        mask_mod=lambda b, h, q, kv: q >= kv,
        seq_lengths=(300, 300),
    )


def triangle(seq_len: int) -> Tensor:
    return torch.ones(seq_len, seq_len, dtype=torch.bool).tril()


def hidden(size: int) -> Tensor:
    return torch.ones(size, size).triu(1).bool()


def added(sz: int, device: str) -> Tensor:
    return torch.full((sz, sz), float("-inf"), device=device).triu(1)


def of_ids(ids: Tensor, pad: int = 0) -> Tensor:
    length = ids.shape[1]
    return (ids != pad)[:, None, None, :] & torch.ones(length, length).tril().bool()


TRIANGLE = torch.ones(2, 6, 12, 12).tril().bool()
WRONG_CELL = TRIANGLE.clone()
WRONG_CELL[1, 5, 2, 3] = True


def of_later_texts(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Wrong in the second text, in a head beyond the first ones."""
    return (q_idx >= kv_idx) | ((b == 1) & (h == 9) & (q_idx == 3) & (kv_idx == 7))
