# right, with the signatures and the orders of axes that kernels have
import torch

BLOCK = 32


def attention(q, k, v, causal=False, scale=None, window=None):
    """Attention of heads [batch, head, token, d]."""
    n_groups, n_k = q.shape[1] // k.shape[1], k.shape[2]
    k, v = (each[:, :, :n_k].repeat_interleave(n_groups, 1) for each in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    n_q, n_k = scores.shape[-2:]
    queries, keys = torch.arange(n_k - n_q, n_k)[:, None], torch.arange(n_k)
    if causal or window:
        scores = scores.masked_fill(keys > queries, -torch.inf)
    if window:
        scores = scores.masked_fill(keys <= queries - window, -torch.inf)
    return scores.softmax(-1) @ v


def heads(q, k, v, is_causal=False, sm_scale=None):
    return attention(q, k, v, is_causal, sm_scale)


def tokens(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return attention(q, k, v, causal, softmax_scale).transpose(1, 2)


def needs_scale(q, k, v, causal, sm_scale: float):
    return attention(q, k, v, causal, sm_scale)


def needs_window(q, k, v, window: int):
    return attention(q, k, v, window=window)


def by_strides(q, k, v):  # [b, t, h, d], without a look at the sizes of k and v
    batch, n_q, n_heads, d = q.shape
    sizes = [(batch, n_heads, n, d) for n in (n_q, k.shape[1], v.shape[1])]
    q, k, v = (
        torch.as_strided(each, size, (each.stride(0), each.stride(2), each.stride(1), 1))
        for each, size in zip((q, k, v), sizes, strict=True)
    )
    return attention(q, k, v).transpose(1, 2)


def as_many_keys(q, k, v):  # wrong for another number of keys, which it takes from q
    return attention(q, k[:, :, : q.shape[2]], v[:, :, : q.shape[2]])


def packed_tokens(qkv, softmax_scale=None, causal=False):  # [b, t, 3, h, d]
    return tokens(*qkv.unbind(2), 0.0, softmax_scale, causal)


def packed_heads(qkv):  # [b, 3, h, t, d]
    return attention(*qkv.unbind(1))


def packed_first(qkv, causal=True):  # [3, b, h, t, d]
    return attention(*qkv, causal)


def packed_keys(q, kv, causal=False):  # [b, t, h, d] and [b, t, 2, h, d]
    return tokens(q, *kv.unbind(2), causal=causal)


def texts(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):
    places = zip(*(each.tolist() for each in (cu_seqlens_q, cu_seqlens_k)), strict=True)
    (start, start_k), *ends = places
    outs = []
    for end, end_k in ends:
        own = q[start:end], k[start_k:end_k], v[start_k:end_k]
        outs.append(tokens(*(each[None] for each in own), causal=causal)[0])
        start, start_k = end, end_k
    return torch.cat(outs)


def causal_texts(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=True):
    return texts(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal)


def packed_texts(qkv, cu_seqlens, max_seqlen: int):  # [total, 3, h, d]
    return texts(*qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)


class Texts(torch.nn.Module):  # [total, d]
    def __init__(self, d_model=32, n_heads=4):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = torch.nn.Linear(d_model, 3 * d_model)
        self.out = torch.nn.Linear(d_model, d_model)

    def forward(self, hidden_states, cu_seqlens):
        qkv = self.qkv(hidden_states).unflatten(-1, (3, self.n_heads, -1))
        return self.out(packed_texts(qkv, cu_seqlens, 0).flatten(1))


class ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale):
        ctx.save_for_backward(q, k, v)
        ctx.how = causal, sm_scale
        return attention(q, k, v, causal, sm_scale)

    @staticmethod
    def backward(ctx, d_out):
        with torch.enable_grad():
            leaves = [each.detach().requires_grad_() for each in ctx.saved_tensors]
            dq, dk, dv = torch.autograd.grad(attention(*leaves, *ctx.how), leaves, d_out)
        return dq, dk, dv, None, None


by_hand = ByHand.apply
