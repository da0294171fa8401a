"""Functions of q, k and v [total, head, d] that take documents by where they start."""

import torch


def attend(q, k, v, cu_seqlens, max_seqlen, causal=True, *, before=0):
    """Each document attends to itself alone, and to so many keys `before` it."""
    outs = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        first = max(start - before, 0)
        i, j = torch.arange(start, end), torch.arange(first, end)
        scores = torch.einsum("ihd,jhd->hij", q[start:end], k[first:end]) * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(j > i[:, None], float("-inf"))
        outs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[first:end]))
    return torch.cat(outs)


def attend_to_one_before(q, k, v, cu_seqlens, max_seqlen, causal=True):
    """Each document sees the last key of the one before."""
    return attend(q, k, v, cu_seqlens, max_seqlen, causal, before=1)


def attend_to_all(q, k, v, cu_seqlens, max_seqlen, causal=True):
    """A kernel that leaves the documents out: all see each other."""
    heads = (each[None].transpose(1, 2) for each in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=causal)
    return out[0].transpose(0, 1)
