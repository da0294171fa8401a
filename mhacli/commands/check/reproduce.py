"""Scripts in plain torch that show how far a function is from the definition of attention."""

import sys

from mhacli.attention.stages import ReferenceLayer
from mhacli.usercode.axes import HEAD_AXES, AxisNames
from mhacli.usercode.user_attention import UserAttention

from .grid import SHARP, Cell

_GRADIENT = "torch.autograd.grad(y, x, d.to(y), materialize_grads=True)[0]"
_LITERALS = (bool, int, float, str, type(None))


def script_of(
    subject: UserAttention, layer: ReferenceLayer, cell: Cell, tensor: str, seed: int
) -> str | None:
    """A script that prints the largest error of a tensor, `out` or a gradient such as `dq`, in a
    call of the grid. It runs in the folder of the function's file or of its package. None for a
    class, a function that cannot be imported by its name, attention of another form, and masks and
    views.
    """
    thing = subject.built.thing
    shape = cell.shape
    variant = cell.variant
    name = getattr(thing, "__name__", "")
    special = (layer.pairing, layer.bias, layer.sinks, layer.visible_cells, subject.example)
    if (
        not subject.is_function
        or vars(sys.modules[thing.__module__]).get(name) is not thing
        or {*subject.axes, *subject.output[1]} != {*HEAD_AXES}
        or any(each is not None for each in special)
        or (variant.form, variant.is_strided, variant.is_between) != (None, False, False)
        or not all(isinstance(each, _LITERALS) for each in (layer.scale, *subject.others.values()))
    ):
        return None
    path, axes = subject.output
    named = [("" if slot.positional_only else f"{slot.name}=", slot.part) for slot in subject.slots]
    rows = [f"{start}{part}{_order(HEAD_AXES, subject.axes)}" for start, part in named]
    n_shared = shape.n_heads // shape.n_kv_heads
    shared = f".repeat_interleave({n_shared}, 1)" if n_shared > 1 else ""
    scores = f"Q @ K{shared}.mT * {variant.scale or layer.scale or shape.d_head**-0.5}"
    if layer.softcap is not None:
        scores = f"({scores} / {layer.softcap}).tanh() * {layer.softcap}"
    if layer.causal:
        later = 1 if layer.top_left else shape.k_len - shape.q_len + 1
        hidden = f"torch.ones({shape.q_len}, {shape.k_len}).triu({later}).bool()"
        scores = f"({scores}).masked_fill({hidden}, -torch.inf)"
    times = f" * {SHARP:g}" if variant.is_sharp else ""
    given = [f"{name}={value}" for name, value in variant.given]
    drawn = "generator=g, dtype=torch.float64"
    script = f"""\
import torch
from {thing.__module__} import {name}
g = torch.Generator().manual_seed({seed})
q, k, v = (torch.randn(size, {drawn}) for size in {shape.sizes})
q, k, v = (x.to({cell.dtype}).requires_grad_() for x in (q{times}, k{times}, v))
Q, K, V = (x.detach().double().requires_grad_() for x in (q, k, v))
out = {name}({", ".join([subject.arguments_text(rows), *given])}){path}{_order(axes, HEAD_AXES)}
true = ({scores}).softmax(-1) @ V{shared}
"""
    if tensor != "out":
        script += f"""\
g.manual_seed({seed + 2})
d = torch.randn(true.shape, {drawn}).to(q.dtype)
out, true = ({_GRADIENT} for y, x in ((out, {tensor[1:]}), (true, {tensor[1:].upper()})))
"""
    return script + "print((out.double() - true).abs().nan_to_num(torch.inf).max().item())\n"


def _order(have: AxisNames, want: AxisNames) -> str:
    """The code that moves axes."""
    return "" if have == want else f".permute{tuple(map(have.index, want))}"
