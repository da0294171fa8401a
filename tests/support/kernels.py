"""Mistakes of blockwise kernels, made in `contract/check/cases/kernels.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from torch import Tensor, nn

from support import user_code

KERNELS = Path(__file__).parents[1] / "contract" / "check" / "cases" / "kernels.py"
ATTEND, CAUSALLY = "attend", "attend_causally"
BLOCKS = "for start in range(0, n_k, BLOCK):"
WHOLE_BLOCKS = "for start in range(0, max(n_k // BLOCK, 1) * BLOCK, BLOCK):"
LATER = "rows = torch.arange(n_k - n_q, n_k, device=q.device)[:, None]"
SUM = "total = total * shrink + weights.sum(-1, keepdim=True)"


class Kernel(NamedTuple):
    """A mistake in a blockwise kernel: in which pass, what stands in the place of what, the code,
    the tensors that differ, and in which calls, as a part of the sentence. `is_wrong_in` names the
    functions that it makes wrong.
    """

    old: str
    new: str
    code: str
    tensors: str
    where: str
    is_backward: bool = False
    is_wrong_in: tuple[str, ...] = (ATTEND, CAUSALLY)


MISTAKES = {
    "last block dropped": Kernel(
        BLOCKS, WHOLE_BLOCKS, "differs-beyond", "out", "last block of 32 keys is incomplete"
    ),
    "nothing behind the fourth block": Kernel(
        BLOCKS,
        "for start in range(0, min(n_k, 4 * BLOCK), BLOCK):",
        "differs-beyond",
        "out",
        "with more than 127 keys",
    ),
    "keys of the first two texts": Kernel(
        "n_q, n_k, scale =",
        "keys = keys[torch.arange(len(q)) % 2] if len(q) > 3 else keys; n_q, n_k, scale =",
        "differs-beyond",
        "out",
        "with more than 3 texts in a batch",
    ),
    "zero keys counted": Kernel(
        SUM,
        f"{SUM} + (BLOCK - end + start) * torch.exp(-safe) * (n_k > BLOCK)",
        "differs-beyond",
        "out",
        "last block of 32 keys is incomplete",
    ),
    "no maximum": Kernel(
        "new = torch.maximum(largest, scores.amax(-1, keepdim=True))",
        "new = torch.zeros_like(largest)",
        "softmax-overflow",
        "",
        "",
    ),
    "sum not rescaled": Kernel(
        "total = total * shrink +", "total = total +", "differs-beyond", "out", ""
    ),
    "scale of a power of two": Kernel(
        "q.shape[3] ** -0.5",
        "(1 << (q.shape[3] - 1).bit_length()) ** -0.5",
        "differs-beyond",
        "out",
        "width is no power of two",
    ),
    "backward from the top left": Kernel(
        LATER,
        "rows = torch.arange(n_q, device=q.device)[:, None]",
        "gradient-differs",
        "dq, dk, dv",
        "Tq ≠ Tk",
        is_backward=True,
        is_wrong_in=(CAUSALLY,),
    ),
    "backward without a mask": Kernel(
        "if ctx.is_causal:",
        "if False:",
        "gradient-differs",
        "dq, dk, dv",
        "",
        is_backward=True,
        is_wrong_in=(CAUSALLY,),
    ),
    "backward without the last block": Kernel(
        BLOCKS,
        WHOLE_BLOCKS,
        "gradient-differs",
        "dq, dk, dv",
        "last block of 32 keys is incomplete",
        is_backward=True,
    ),
    "delta of the gradient": Kernel(
        "delta = (d_out * out)",
        "delta = (d_out * d_out)",
        "gradient-differs",
        "dq, dk",
        "at every shape",
        is_backward=True,
    ),
    "dq without scale": Kernel(
        "dq += d_scores @ keys[:, :, start:end] * scale",
        "dq += d_scores @ keys[:, :, start:end]",
        "gradient-differs",
        "dq",
        "at every shape",
        is_backward=True,
    ),
    "dk without scale": Kernel(
        "d_scores.mT @ q * scale",
        "d_scores.mT @ q",
        "gradient-differs",
        "dk",
        "at every shape",
        is_backward=True,
    ),
    "dk of the first head": Kernel(
        "dk = dk.unflatten(1, (-1, n_groups)).sum(2)",
        "dk = dk.unflatten(1, (-1, n_groups))[:, :, 0]",
        "gradient-differs",
        "dk",
        "query heads share kv heads",
        is_backward=True,
    ),
}


def kernel(folder: Path, mistake: str | None = None, *, block: int = 32) -> ModuleType:
    """The file of kernels as a module, with a mistake, in blocks of some keys."""
    forward, name, backward = KERNELS.read_text().partition("    def backward(")
    if mistake is not None:
        each = MISTAKES[mistake]
        changed = (backward if each.is_backward else forward).replace(each.old, each.new)
        assert changed not in (forward, backward)
        forward, backward = (forward, changed) if each.is_backward else (changed, backward)
    path = folder / "kernel.py"
    text = forward + name + backward
    path.write_text(text.replace("BLOCK = 32", f"BLOCK = {block}"))
    return user_code.load(path)


class Layer(nn.Module):
    """A layer around a function of q, k and v."""

    def __init__(
        self, attend: Callable[..., Tensor], n_heads: int = 4, n_kv_heads: int = 2
    ) -> None:
        super().__init__()
        self.attend, self.n_heads, self.n_kv_heads = attend, n_heads, n_kv_heads
        d_head = 24
        self.q_proj = nn.Linear(96, n_heads * d_head)
        self.k_proj = nn.Linear(96, n_kv_heads * d_head)
        self.v_proj = nn.Linear(96, n_kv_heads * d_head)
        self.out_proj = nn.Linear(n_heads * d_head, 96)

    def forward(self, x: Tensor) -> Tensor:
        """The output for each token."""
        q = self.q_proj(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.n_kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.n_kv_heads, -1)).transpose(1, 2)
        return self.out_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))
