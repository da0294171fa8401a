"""The mask alone, from its predicate: asked block by block, so that a long text needs no T×T memory."""

from __future__ import annotations

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from mhacli.attention.masks import both
from mhacli.compute.base.devices import choose_device
from mhacli.compute.base.setup import make_mask
from mhacli.errors import MhaError
from mhacli.requests.layer import LayerRequest
from mhacli.results.mask import MaskSurvey, SequenceMask
from mhacli.spec.variants import mask_rules

MAX_BLOCKS = 256
"""Blocks of the map along its longer side, at most."""
MAX_CELLS = 1 << 34
"""Most cells to ask of a mask: some minutes."""
_BLOCK_CELLS = 1 << 20


def survey_mask(request: LayerRequest) -> MaskSurvey:
    """What the mask of a request allows over its tokens. Raises `MhaError` when the device is missing
    or the cells are too many to ask for each.
    """
    facts, device = request.facts, choose_device(request.config.device)
    n_asked = facts.batch * facts.q_len * facts.k_len
    if n_asked > MAX_CELLS:
        raise MhaError(
            f"a mask must have at most {MAX_CELLS:,} cells to be drawn, got {n_asked:,}",
            hint="--max-tokens takes a shorter text, --random a smaller shape",
            code="too-large",
        )
    allowed, k_idx = make_mask(request.encoded, facts, device) or both(), _positions(0, facts.k_len, device)
    block = -(-max(facts.q_len, facts.k_len) // MAX_BLOCKS)
    height = block * max(1, _BLOCK_CELLS // (facts.batch * facts.k_len * block))
    n_rows, n_columns = -(-facts.q_len // block), -(-facts.k_len // block)
    per_query = torch.zeros(facts.batch, facts.q_len, dtype=torch.int64)
    counts = torch.zeros(facts.batch, n_rows, n_columns, dtype=torch.int64)
    for start in range(0, facts.q_len, height):
        q_idx = _positions(start, min(start + height, facts.q_len), device)
        cells = allowed(q_idx, k_idx)[:, 0].expand(facts.batch, len(q_idx), facts.k_len)
        of_rows = _count_in_blocks(cells, block)
        per_query[:, start : start + height] = of_rows.sum(dim=-1)
        counts[:, start // block : -(-(start + height) // block)] = _count_in_blocks(of_rows.mT, block).mT
    rows, blocks = per_query.tolist(), counts.tolist()
    n_cells = facts.q_len * facts.k_len
    masks = tuple(
        SequenceMask(tuple(row), n_cells, block, tuple(map(tuple, grid)))
        for row, grid in zip(rows, blocks, strict=True)
    )
    return MaskSurvey(request.config, request.encoded.sequences, request.encoded.context, mask_rules(facts), masks)


def _positions(start: int, end: int, device: torch.device) -> Int[Tensor, " idx"]:
    """Narrow numbers: a mask over many cells is faster to ask with them."""
    return torch.arange(start, end, dtype=torch.int32, device=device)


def _count_in_blocks(numbers: Shaped[Tensor, "batch row column"], block: int) -> Int[Tensor, "batch row blocks"]:
    """Sums over `block` columns each; the last block may be smaller. Of true and false in float32, which is fastest."""
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % block))
    summands = padded.float() if padded.dtype == torch.bool else padded
    counts: Tensor = summands.unflatten(-1, (-1, block)).sum(dim=-1)
    return counts.long()
